"""The documentation: its pages, their blocks of code, and how tests run them."""
