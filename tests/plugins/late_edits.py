"""Test plugin: requests change after every check of the front end, like those of a front end without checks.

`support.plugins` installs it. A request's `routing_key` is `late: ` and an object with fields of the tokenised request,
and of its `sampling_params`.
"""

import functools
import json
from array import array

MARK = "late: "


def register():
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    create = TokenizerManager._create_tokenized_object

    @functools.wraps(create)
    def created(manager, obj, *args, **kwargs):
        tokenized = create(manager, obj, *args, **kwargs)
        if (obj.routing_key or "").startswith(MARK):
            for name, value in json.loads(obj.routing_key.removeprefix(MARK)).items():
                if name == "sampling_params":
                    for param, number in value.items():
                        setattr(tokenized.sampling_params, param, number)
                else:
                    setattr(tokenized, name, array("q", value) if name == "input_ids" and value else value)
        return tokenized

    TokenizerManager._create_tokenized_object = created
