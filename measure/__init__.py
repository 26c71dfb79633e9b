"""Programs that measure: every number and table of the docs comes from one of them."""
