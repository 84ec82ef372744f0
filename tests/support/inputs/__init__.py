"""Wrong inputs as data: tests/inputs/README.md describes the cases of tests/inputs/*.yaml."""
