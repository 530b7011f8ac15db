import torch
from tests.backend.test_chunks import *
def rep(case, times, chunks):
    rt = runtime_of(case.members, case.nodes)
    if rt is None: return []
    recipe = recipe_for(case.torch_dtype).with_reduction(case.reduction)
    x, routing = case.inputs(rt.rank)
    e = experts_of(case, rt.rank, recipe)
    w = rt.moe(x, routing, e, recipe=recipe, plan=Plan(exchange=case.exchange, chunks=1))
    out=[]
    for i in range(times):
        y = rt.moe(x, routing, e, recipe=recipe, plan=Plan(exchange=case.exchange, chunks=chunks))
        if not equal_bits(y,w):
            d=(y!=w)&~((y!=y)&(w!=w)); nz=d.nonzero(); out.append((i, nz[:4].tolist(), len(nz), float((y-w).abs().max())))
        z = rt.moe(x, routing, e, recipe=recipe, plan=Plan(exchange=case.exchange, chunks=1))
        if not equal_bits(z,w): out.append(("whole",i))
    return rt.rank, out[:6], len(out)
