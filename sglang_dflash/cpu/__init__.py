"""What SGLang needs to serve on a machine without a GPU."""
