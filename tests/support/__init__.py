"""Parts that tests share: models, checkpoints, engines and servers to test with."""
