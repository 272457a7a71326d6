"""The faults of docs/faults.md, one function each; a module is a section of the page."""
