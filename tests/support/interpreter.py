"""A faster interpreter of Triton, with the same results.

For every operation it makes objects that describe types and shapes. Here equal ones are made once.
"""

from __future__ import annotations

import builtins
from dataclasses import replace

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up() -> None:
    """Change the interpreter of this process. Call it once, before any launch."""
    patch_language_once()
    # It computes whether integers overflow, and asserts the result only with `debug`, which it never sets.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    keep_numpy_dtypes()
    keep_types_of_blocks()
    compare_fast()


def patch_language_once() -> None:
    """Patch Triton's language once per module, and not in every call of a device function."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn):
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def keep_numpy_dtypes() -> None:
    compute, kept = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype):
        # Names differ between a type, its pointers and its blocks.
        found = kept.get(dtype.name)
        if found is None:
            found = kept[dtype.name] = compute(dtype)
        return found

    interpreter._get_np_dtype = numpy_dtype


def keep_types_of_blocks() -> None:
    """Make equal types of blocks share their fields, and tensors of one type share their shape."""
    init_type, init_tensor, kept = core.block_type.__init__, core.tensor.__init__, {}

    def init_block_type(self, element_ty, shape):
        sizes = builtins.tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        # The fields hold the type of the elements, so no other object gets its id.
        key = id(element_ty), sizes
        fields = kept.get(key)
        if fields is None:
            init_type(self, element_ty, shape)
            fields = kept[key] = dict(vars(self))
        vars(self).update(fields)

    def init(self, handle, type):
        fields = vars(type).get("fields_of_tensors")
        if fields is None:
            init_tensor(self, handle, type)
            fields = {name: value for name, value in vars(self).items() if name not in ("handle", "type")}
            type.fields_of_tensors = fields
            if isinstance(type, core.block_type):
                kept[id(type.element_ty), builtins.tuple(type.shape)]["fields_of_tensors"] = fields
        else:
            vars(self).update(fields)
            self.handle, self.type = handle, type

    core.block_type.__init__, core.tensor.__init__ = init_block_type, init


def compare_fast() -> None:
    """Compare types by their plain sizes, and return at once what already has one shape, or needs no unwrapping."""
    equals, broadcast, unwrap = core.dtype.__eq__, TritonSemantic.broadcast_impl_value, core._unwrap_if_constexpr
    unwrapped = {int, bool, float, core.tensor, core.dtype, core.block_type}

    def same_dtypes(self, other):
        return self is other or equals(self, other)

    def same_blocks(self, other):
        if not isinstance(other, core.block_type):
            return False
        return self.element_ty == other.element_ty and self.shape.values == other.shape.values

    def broadcast_both(self, lhs, rhs):
        shapes = [x.type.shape.values if x.type.is_block() else None for x in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(self, lhs, rhs)

    def unwrap_fast(o):
        kind = type(o)
        if kind in unwrapped:
            return o
        return o.value if kind is core.constexpr else unwrap(o)

    core.dtype.__eq__, core.block_type.__eq__ = same_dtypes, same_blocks
    TritonSemantic.broadcast_impl_value, core._unwrap_if_constexpr = broadcast_both, unwrap_fast
