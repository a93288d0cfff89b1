"""`jaxis plan --train`: device memory that a training needs, estimated without weights and without compiling."""
