"""How results look: rich tables and lines for people, one JSON object for programs. Results go to stdout."""
