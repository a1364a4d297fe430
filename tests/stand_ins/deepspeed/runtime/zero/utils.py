"""How DeepSpeed tells parameters of ZeRO-3."""


def is_zero_param(parameter):
    return hasattr(parameter, "ds_id")
