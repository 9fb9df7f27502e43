"""Triton's interpreter as the kernel tests need it. Nothing of it runs on a GPU."""

from functools import wraps

import torch


def mend_interpreter() -> None:
    """Triton's interpreter keeps bfloat16 as bare bits: make it round (it cuts) and multiply the values (not the bits).

    Arithmetic on bfloat16 other than `tl.dot` stays wrong there: kernels convert to float32 first, as they should.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    if hasattr(convert, "__wrapped__"):
        return

    @wraps(convert)
    def rounding(data, source, target, rounding_mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding_mode)
        rounded = torch.tensor(data).to(torch.bfloat16).view(torch.int16)
        return rounded.numpy().view(interpreter._get_np_dtype(tl.bfloat16))

    def multiplying(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    interpreter._convert_float = rounding
    interpreter.InterpreterBuilder.create_dot = multiplying
