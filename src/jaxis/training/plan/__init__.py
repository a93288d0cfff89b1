"""`jaxis plan --train`: what a training needs of each device's memory, told without weights and without compiling."""
