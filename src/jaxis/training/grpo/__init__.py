"""Group relative policy optimization (arXiv:2402.03300): sampled answers are compared within their group."""
