"""Requests of clients: checks, failures, ends of answers, administrative calls and weight updates."""
