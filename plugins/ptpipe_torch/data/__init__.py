"""Data sets: splits, batches, images, augmentation and loading."""
