"""Images in prompts: decoded and resized here, encoded by a model's vision tower, and put in place of embeddings."""
