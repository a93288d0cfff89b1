"""Group relative policy optimization (arXiv:2402.03300): answers are sampled, and compared within their group."""
