"""docs/models.md, made from a table of families and from the published configurations of the tests."""
