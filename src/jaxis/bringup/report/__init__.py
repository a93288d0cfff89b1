"""The bring-up checklist as a report."""
