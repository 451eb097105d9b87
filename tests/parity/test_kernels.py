"""The compiled kernels against torch, operation by operation and attention by attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_families import VARIANTS, WINDOW, make_attention, make_family
from tiny_llama import HandFed, make_decoder, reference_logits

from firstdiff.engine.attention import AttentionRules, KVCache, TorchAttention
from firstdiff.engine.attention_kernel import KernelAttention
from firstdiff.engine.batch import Batch, PrefillSpan
from firstdiff.engine.linear import Linear
from firstdiff.engine.linear_kernel import KernelLinear
from firstdiff.engine.ops import ComposedStage, Following, HeadShape, StageParts, TorchOps
from firstdiff.engine.ops_kernel import KernelOps, set_threads

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module", params=[1, 2])
def threads(request):
    set_threads(request.param)
    return request.param


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    assert got.shape == want.shape
    tolerance = TOLERANCE[want.dtype]
    return torch.allclose(got.float(), want.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "depth"), [(1, 1), (31, 33), (32, 16), (97, 576), (960, 576)])
def test_products_agree(dtype, num_outputs, depth, threads):
    weight = random(num_outputs, depth, seed=1, dtype=dtype) / depth**0.5
    bias = random(num_outputs, seed=2, dtype=dtype)
    for num_rows in (0, 1, 2, 7, 12, 13, 25, 96, 97, 200):
        x = random(num_rows, depth + 3, seed=num_rows, dtype=dtype)[:, 1 : depth + 1]
        for b in (None, bias):
            got = KernelLinear(weight, b, threads=threads)(x)
            assert close(got, Linear(weight, b, pack=False)(x))


def test_a_wide_product_is_not_rounded(threads):
    weight, x = random(64, 100, seed=1, dtype=torch.bfloat16), random(3, 100, seed=2, dtype=torch.bfloat16)
    got = KernelLinear(weight, threads=threads, wide=True)(x)
    assert got.dtype == torch.float32
    assert torch.allclose(got, x.float() @ weight.float().T, atol=1e-4)
    assert not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 40, 576])
def test_norms_agree(dtype, weight_dtype, width, threads):
    truth, fast = TorchOps(), KernelOps(threads=threads)
    weight = random(width, seed=3).to(weight_dtype)
    for num_rows in (0, 1, 9):
        x, added = random(num_rows, width, seed=4, dtype=dtype), random(num_rows, width, seed=5, dtype=dtype)
        assert close(fast.norm(x, weight, 1e-5), truth.norm(x, weight, 1e-5))
        want = truth.add_norm(x, added, weight, 1e-5)
        got = fast.add_norm(x.clone(), added, weight, 1e-5)
        assert torch.equal(got[0], want[0])
        assert close(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", [3, 48, 200])
def test_gates_agree(dtype, activation, width, threads):
    truth, fast = TorchOps(), KernelOps(threads=threads)
    for scale in (1.0, 30.0, 1e4):
        x = random(9, 2 * width, seed=6, dtype=dtype) * scale
        assert close(fast.gate(x, activation), truth.gate(x, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 12, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_turned_heads_agree(dtype, head_dim, normed, threads):
    shape = HeadShape(6, 2, head_dim)
    truth, fast = TorchOps(), KernelOps(threads=threads)
    qkv = random(9, (6 + 2 * 2) * head_dim, seed=7, dtype=dtype)
    angles = random(9, head_dim, seed=8)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = random(shape.num_turned, head_dim, seed=9) if normed else None
    want = truth.turn(qkv, shape, cos, sin, weight, 1e-6)
    got = fast.turn(qkv.clone(), shape, cos, sin, weight, 1e-6)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours.float(), theirs.float(), atol=3 * TOLERANCE[dtype], rtol=1e-2)


def stage_parts(
    ops: KernelOps, dtype: torch.dtype, *, extra_norms: bool, activation: str, seed: int
) -> StageParts:
    """Random parts whose widths are no multiples of a panel; with Gemma's additional norms, or without."""
    width, inner, shape = 40, 52, HeadShape(3, 1, 12)

    def weight(num_outputs: int, depth: int, offset: int) -> torch.Tensor:
        return random(num_outputs, depth, seed=seed + offset, dtype=dtype) / depth**0.5

    num_qkv = (3 + 2) * 12
    extra = random(width, seed=seed + 7) if extra_norms else None
    return StageParts(
        shape=shape,
        activation=activation,
        eps=1e-5,
        output=ops.linear(weight(width, 36, 1), None),
        attended_norm=extra,
        mlp_norm=random(width, seed=seed + 8, dtype=dtype),
        gate_up=ops.linear(weight(2 * inner, width, 2), None),
        down=ops.linear(weight(width, inner, 3), None),
        mlp_added_norm=extra,
        following=Following(
            norm=random(width, seed=seed + 9, dtype=dtype),
            qkv=ops.linear(weight(num_qkv, width, 4), random(num_qkv, seed=seed + 5, dtype=dtype)),
            qk_norm=random(4, 12, seed=seed + 6) if extra_norms else None,
        ),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("extra_norms", "activation"), [(False, "silu"), (True, "gelu_pytorch_tanh")])
def test_a_stage_is_its_operations_in_order(dtype, extra_norms, activation, threads):
    """Bit for bit, whatever sizes of steps came before, with two layers in one memory."""
    ops = KernelOps(threads=threads)
    parts = [
        stage_parts(ops, dtype, extra_norms=extra_norms, activation=activation, seed=seed) for seed in (0, 50)
    ]
    stages = ops.stages(parts)
    for num_rows in (1, 9, 3, 40, 40, 2, 100):
        for stage, part in zip(stages, parts, strict=True):
            residual = random(num_rows, 40, seed=num_rows, dtype=dtype)
            attended = random(num_rows, 36, seed=num_rows + 1, dtype=dtype)
            angles = random(num_rows, 12, seed=num_rows + 2)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            composed = ComposedStage(ops, part)
            for got, want in (
                (
                    stage.advance(residual.clone(), attended, cos, sin),
                    composed.advance(residual.clone(), attended, cos, sin),
                ),
                (stage.finish(residual.clone(), attended), composed.finish(residual.clone(), attended)),
            ):
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad):
    """A NaN that became a number would be a plausible token."""
    fast = KernelOps()
    for dtype in DTYPES:
        x = random(2, 64, dtype=dtype)
        x[1, 5] = bad
        weight = random(32, 64, dtype=dtype)
        for result in (fast.linear(weight, None)(x), fast.norm(x, weight[0], 1e-5)):
            assert torch.isfinite(result[0]).all()
            assert not torch.isfinite(result[1]).all()


def paged(lengths: list[tuple[int, int]], block_size: int, *, seed: int) -> tuple[Batch, int]:
    """A batch of (context before, new rows) sequences on shuffled blocks; decodes must come first."""
    blocks = [-(-(start + rows) // block_size) for start, rows in lengths]
    order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    positions: list[int] = []
    slots: list[int] = []
    context_lens, tables, prefills = [], [], []
    for (start, rows), count in zip(lengths, blocks, strict=True):
        table, order = order[:count], order[count:]
        if rows == 1 and not prefills:
            context_lens.append(start + 1)
            tables.append(table)
        else:
            prefills.append(PrefillSpan(len(positions), rows, start, torch.tensor(table)))
        new = range(start, start + rows)
        positions += new
        slots += [table[p // block_size] * block_size + p % block_size for p in new]
    rows = torch.tensor(positions)
    return Batch(rows, rows, torch.tensor(slots), rows, context_lens, tables, prefills), sum(blocks) + 3


LENGTHS = [(0, 1), (1, 1), (14, 1), (15, 1), (16, 1), (200, 1), (0, 37), (5, 16), (40, 3), (61, 20)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 12), (4, 1, 80)])
def test_attention_agrees(dtype, block_size, num_heads, num_kv_heads, head_dim, threads):
    """Ragged decodes and chunks, with and without windows; what lies elsewhere in the cache is NaN."""
    batch, num_blocks = paged(LENGTHS, block_size, seed=block_size)
    rules = AttentionRules(0.3, (None, 7, 16, 50))
    caches = []
    for _ in range(2):
        cache = KVCache.allocate(
            num_layers=4, num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim, dtype=dtype,
        )  # fmt: skip
        for tensor, seed in ((cache.keys, 1), (cache.values, 2)):
            tensor.copy_(random(*tensor.shape, seed=seed))
            poison(tensor, batch, block_size)
        caches.append(cache)
    n = len(batch.positions)
    q, k, v = (random(n, heads, head_dim, seed=s, dtype=dtype) for s, heads in
               ((3, num_heads), (4, num_kv_heads), (5, num_kv_heads)))  # fmt: skip
    truth, fast = TorchAttention(caches[0], rules), KernelAttention(caches[1], rules, threads=threads)
    truth.plan(batch)
    fast.plan(batch)
    for layer in range(4):
        assert close(fast.forward(q, k, v, layer), truth.forward(q, k, v, layer))
        assert torch.equal(caches[0].keys[layer].nan_to_num(), caches[1].keys[layer].nan_to_num())


def cut(lengths: list[int], rows: tuple[torch.Tensor, ...], block_size: int, threads: int) -> torch.Tensor:
    """Attention of one sequence in chunks of `lengths`, each computed beside a decode of another."""
    q, k, v = rows
    num_blocks, others = -(-len(q) // block_size), -(-40 // block_size)
    table, other = list(range(num_blocks))[::-1], [num_blocks + block for block in range(others)]
    cache = KVCache.allocate(
        num_layers=1, num_blocks=num_blocks + others, block_size=block_size, num_kv_heads=k.shape[1],
        head_dim=k.shape[2], dtype=k.dtype,
    )  # fmt: skip
    attention, found, start = KernelAttention(cache, threads=threads), [], 0
    for length in lengths:
        taken = slice(start, start + length)
        slots = [table[p // block_size] * block_size + p % block_size for p in range(*taken.indices(len(q)))]
        slots.insert(0, other[39 // block_size] * block_size + 39 % block_size)
        contexts, tables, spans = [40], [other], [PrefillSpan(1, length, start, torch.tensor(table))]
        if length == 1:
            contexts, tables, spans = [40, start + 1], [other, table], []
        ids = torch.zeros(1 + length, dtype=torch.int64)
        attention.plan(Batch(ids, ids, torch.tensor(slots), ids, contexts, tables, spans))
        new = (torch.cat((tensor[:1], tensor[taken])) for tensor in (q, k, v))
        found.append(attention.forward(*new, 0)[1:].clone())
        start += length
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (6, 1, 96), (4, 2, 20)])
def test_chunks_and_blocks_change_no_bit_of_attention(dtype, num_heads, num_kv_heads, head_dim, threads):
    """A chunk copies the keys that a decode reads where they lie."""
    heads = (num_heads, num_kv_heads, num_kv_heads)
    rows = tuple(random(70, n, head_dim, seed=n + i, dtype=dtype) * 3 for i, n in enumerate(heads))
    whole = cut([70], rows, 16, threads)
    assert torch.equal(cut([5, 16, 1, 1, 30, 17], rows, 3, threads), whole)
    assert torch.equal(cut([1] * 70, rows, 16, threads), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [1.0, -1.0, 25.0, -25.0])
def test_scores_may_rise_and_fall_without_end(dtype, step):
    """What the weights are relative to is left behind by hundreds, or never met again."""
    length, dim = 100, 32
    # A score is one value of its key, so that large ones are exact.
    q = torch.eye(dim, dtype=dtype)[:1].expand(length, 1, dim).contiguous()
    k = random(length, 1, dim)
    k[:, 0, 0] += torch.arange(length) * step
    k, v = k.to(dtype), random(length, 1, dim, seed=1, dtype=dtype)
    batch, num_blocks = paged([(0, length)], 16, seed=0)
    shape = {"num_layers": 1, "num_blocks": num_blocks, "block_size": 16, "num_kv_heads": 1, "head_dim": dim}
    caches = [KVCache.allocate(**shape, dtype=dtype) for _ in range(2)]
    rules = AttentionRules(1.0, (None,))
    truth, fast = TorchAttention(caches[0], rules), KernelAttention(caches[1], rules)
    truth.plan(batch)
    fast.plan(batch)
    assert close(fast.forward(q, k, v, 0), truth.forward(q, k, v, 0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_own_rows(bad, dtype):
    """From the position that has it on; earlier rows that share its sixteen do not see it."""
    q, k, v = (random(40, heads, 64, seed=heads, dtype=dtype) for heads in (3, 1, 1))
    k[20, 0, 7] = bad
    rows = cut([8, 8, 4, 20], (q.abs(), k, v), 16, 1)
    assert torch.isfinite(rows[:20]).all()
    assert not torch.isfinite(rows[20:].view(20, 3, 64)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_a_row_that_is_not_finite_spoils_no_other(head_dim, dtype):
    """Rows are computed one after another in the same memory."""
    q, k, v = (random(20, heads, head_dim, seed=heads, dtype=dtype) for heads in (3, 1, 1))
    q[0] = float("nan")  # of the decode beside each step too, which comes first
    for lengths in ([1] * 20, [1, 9, 10]):
        rows = cut(lengths, (q, k, v), 16, 1)
        assert torch.isnan(rows[0]).all()
        assert torch.isfinite(rows[1:]).all()


def poison(tensor: torch.Tensor, batch: Batch, block_size: int) -> None:
    """NaN in every slot that no sequence of the batch holds."""
    held = torch.zeros(tensor.shape[1] * block_size, dtype=torch.bool)
    contexts = [*zip(batch.block_tables, batch.context_lens, strict=True)]
    contexts += [(span.block_table.tolist(), span.start + span.num_rows) for span in batch.prefills]
    for table, length in contexts:
        for position in range(length):
            held[table[position // block_size] * block_size + position % block_size] = True
    tensor.flatten(1, 2)[:, ~held] = float("nan")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_agrees_with_transformers(tmp_path, variant):
    """Chunked across the window, decodes beside a prefill: the kernels from end to end."""
    reference = make_family(tmp_path, variant)
    decoder = make_decoder(tmp_path, ops=KernelOps())
    fed = HandFed(decoder, make_attention(KernelAttention, decoder))
    lengths = (2, WINDOW, 33, 90)
    ids = {n: torch.randint(3, 90, (n + 4,), generator=torch.Generator().manual_seed(n)).tolist()
           for n in (*lengths, 20)}  # fmt: skip
    sequences = {n: fed.sequence(tokens) for n, tokens in ids.items()}
    expected = {n: reference_logits(reference, tokens) for n, tokens in ids.items()}
    fed.step([(sequences[n], n) for n in lengths])
    for step in range(4):
        logits = fed.step([(sequences[n], 1) for n in lengths] + [(sequences[20], 5)])
        for row, n in enumerate(lengths):
            assert (logits[row] - expected[n][n + step]).abs().max() < 1e-4
        assert (logits[len(lengths)] - expected[20][5 * step + 4]).abs().max() < 1e-4


def test_more_threads_than_cpus_are_refused():
    with pytest.raises(ValueError, match="--threads of at most"):
        set_threads(4096)
