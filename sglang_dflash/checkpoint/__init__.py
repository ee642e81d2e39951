"""A DFlash checkpoint's config and tensors, of every format."""
