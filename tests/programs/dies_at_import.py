"""Dies at import."""

import a_module_that_nobody_has  # noqa: F401

print("step=1 tok/s=1")
