"""Reports on the bring-up checklist."""
