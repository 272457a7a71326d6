"""From files to the rows of a step: read, rendered, tokenised once, cut, packed, and put in order."""
