"""A small model trained together with what drafts for it, so that acceptance can be measured without a download."""
