"""What a run says of itself: records, printed lines and trackers, and the figures in them."""
