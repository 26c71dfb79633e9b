"""Programs of the tests that are migrated, and run before and after."""
