"""Test plugin: a server with Triton's interpreter uses the faster one (`support/interpreter.py`)."""


def register():
    from support.interpreter import speed_up

    speed_up()
