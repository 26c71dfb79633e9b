"""The tables and listings that pages of the docs hold between markers."""
