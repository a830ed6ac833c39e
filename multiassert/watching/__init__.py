"""Watch a model: hooks on all its modules that name the first place where something turned bad, the row and the step.

with multiassert.watch(model) as watch:
    model.generate(**batch)
print(watch.report())
# model.layers.7.self_attn.q_proj: output NaN, row 1, step 12; its input was clean, its weight not
"""

from __future__ import annotations

from torch import nn

from multiassert.watching.handle import Watch

__all__ = ["Watch", "watch"]


def watch(model: nn.Module, *, name: str = "", ops: bool = False, step_per_call: bool = True) -> Watch:
    """Put hooks on every module that probe what it is given and what it returns; touches no device, no hook waits.

    Everything floating-point is looked at for NaN and Inf, and the ids of every embedding for being inside
    `[0, num_embeddings)`, before the embedding fails on them. Of all places that turn bad in a call of the model only
    the first is told, and a later one with the rows in which no earlier one was bad; code between modules is named by
    the modules around it. Violations go where those of any probe go, and to the handle's `violations`, `first()` and
    `report()`. The modes decide as for any probe; off, the hooks return at once.

    Works on any module. Where there are `input_ids` (or `inputs_embeds`) and an `attention_mask` of two dimensions, as
    in transformers, what the mask leaves out sets off no alarm. Masks that are added to scores may hold -Inf.

    A mask of all slots of a static cache is read by `cache_position` or the length of the cache; where neither says
    which slots a call is about, nothing counts as padding.

    `name` is put before the names of modules: give one to each of several models (draft and target). `ops` looks at
    each operator instead, and names the first faulty one with the line that called it; it is slow, and makes compiled
    code run eagerly. `step_per_call` ends a step with each call of the model, so that a record says which call it was.
    A watched module that is called by itself, outside a call of the model (an lm_head on chosen rows), is a call of its
    own and ends a step, too: pass `step_per_call=False` in such an engine, and in one that calls `multiassert.step()`.

    In code that torch.compile compiles later the hooks are part of the graph, without a graph break; call `step()`
    yourself if all of the model is compiled. Code compiled before runs on without them, and watch() warns.

    A copy of a watched model (copy.deepcopy, pickle, torch.save) is not watched: watch it by itself. Several threads
    may call the model at the same time; what one of them finds hides nothing of another. Raises ValueError for a model
    that is watched already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return Watch(model, name, ops, step_per_call)
