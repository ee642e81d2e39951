"""Values of command lines."""

import argparse


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def number_or_none(text: str) -> int | None:
    return None if text == "none" else positive(text)
