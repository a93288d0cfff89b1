"""Image encoders beside text models: their weights in device memory, and the images that they have encoded."""
