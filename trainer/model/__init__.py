"""What is computed: the frozen target, the drafter, who attends to whom, and the loss."""
