"""The defects: name, where, what is replaced by what."""

# A table: one line a defect, however long.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from types import ModuleType

from firstdiff.engine import block_pool, engine, scheduler, sequence, step_budget
from firstdiff.engine.block_pool import BlockPool
from firstdiff.engine.engine import LLMEngine
from firstdiff.engine.scheduler import Scheduler
from firstdiff.engine.step_budget import Step

_EARLY = """step.place(sequence, num_tokens, 0)
        start = sequence.num_computed_tokens
        self._advance(sequence, start, start + num_tokens, 0, now_ns)
        sequence.num_computed_tokens = start
        sequence.prefill_chunks.clear()
        sequence.prefix_parent = None"""

_FAILED_STEP_KEPT = """failed = [item.sequence for item in batch.items]
    for item in batch.items:
        if not item.num_draft_tokens:
            self._advance(item.sequence, item.start, item.start + item.num_scheduled_tokens, 0, 0)"""

Edit = tuple[str, type | ModuleType, str, str, str]

POOL: list[Edit] = [
    ("a reallocated block keeps its hash", BlockPool, "allocate", "self._forget(block)", "pass"),
    ("an allocated block stays free", BlockPool, "allocate", "popitem(last=False)", "copy().popitem(last=False)"),
    ("a reference is lost when a block is shared", BlockPool, "hold", "+= 1", "= 1"),
    ("a held hit stays in the free queue", BlockPool, "hold", "del self._free[block]", "pass"),
    ("a table's last block is never released", BlockPool, "release", "reversed(blocks)", "reversed(blocks[:-1])"),
    ("a block is free while others hold it", BlockPool, "release", "if self._ref_counts[block] == 0:", "if True:"),
    ("a hash forgets its parent", block_pool, "chain_hash", "parent + array", "array"),
    ("a hash forgets the salt", block_pool, "root_hash", "if not salt:", "if True:"),
    ("the prefix before a hit is not checked", BlockPool, "match", "cached.parent != parent or ", ""),
    ("the tokens of a hit are not checked", BlockPool, "match", " or cached.token_ids != token_ids[index * size : (index + 1) * size]", ""),
    ("nothing is ever found", BlockPool, "match", "range(num_blocks_max)", "range(0)"),
    ("a match goes on after a missing block", BlockPool, "match", "break\n        cached", "continue\n        cached"),
    ("equal tokens after another prefix pass for the same", BlockPool, "register", "cached.parent == parent and ", ""),
    ("other tokens pass for the same", BlockPool, "register", " and cached.token_ids == token_ids", ""),
    ("a number is given to two prefixes", BlockPool, "register", "self._num_prefixes += 1", "self._num_prefixes = 1"),
    ("a replaced block keeps its hash", BlockPool, "register", "        self._forget(other)\n", "        pass\n"),
    ("hits count as free and as held", BlockPool, "num_allocatable", "num_free -= 1", "pass"),
    ("a reset leaves held blocks findable", BlockPool, "reset", "in list(self._block_by_hash.values())", "in [b for b in self._block_by_hash.values() if not self._ref_counts[b]]"),
    ("a reset forgets nothing", BlockPool, "reset", "self._forget(block)", "pass"),
]

ADMISSION: list[Edit] = [
    ("who runs at a reset is found later", Scheduler, "reset_prefix_cache", "sequence.prefix_parent = None", "pass"),
    ("no token of a known prompt is computed", Scheduler, "_num_cacheable_tokens", "num_tokens - 1", "num_tokens"),
    ("a wanted prompt row comes from the cache", Scheduler, "_num_cacheable_tokens", "from - 1", "from"),
    ("wanted prompt rows do not limit the cache", Scheduler, "_num_cacheable_tokens", "sequence.sampling.prompt_logprobs is None or", "True or"),
    ("cached prefixes are forced on all", Scheduler, "_admissible", "if sequence.use_prefix_cache:", "if True:"),
    ("room for a whole pool is never enough", Scheduler, "_admissible", "num_reserved > self", "num_reserved >= self"),
    ("cached length one too long", Scheduler, "_schedule_waiting", "len(hits) * self._block_size", "len(hits) * self._block_size + bool(hits)"),
    ("cached length one too short", Scheduler, "_schedule_waiting", "len(hits) * self._block_size", "len(hits) * self._block_size - bool(hits)"),
    ("found before it is computed", Scheduler, "_schedule_waiting", "step.place(sequence, num_tokens, 0)", _EARLY),
    ("one seat too many", Scheduler, "_schedule_waiting", "< self._max_num_seqs", "<= self._max_num_seqs"),
    ("hits are counted at each admission", Scheduler, "_schedule_waiting", "if sequence.first_scheduled_ns is None:", "if True:"),
    ("admitted in a step that pushed out", Scheduler, "schedule", "if not num_preemptions and", "if"),
    ("priority is read upside down", Scheduler, "add", "(sequence.priority,", "(-sequence.priority,"),
    ("the queue ignores priority", Scheduler, "add", "insort(self.waiting, sequence, key=_rank)", "self.waiting.append(sequence)"),
    ("the last that fits is refused", Scheduler, "_check", "max(max_tokens - 1, 0)", "max_tokens"),
    ("one request too many in flight", LLMEngine, "add", "num_free < num_wanted and", "num_free < num_wanted - 1 and"),
    ("the salt is dropped at the door", LLMEngine, "add", "cache_salt=request.cache_salt,", ""),
    ("the priority is dropped at the door", LLMEngine, "add", "priority=request.priority,", ""),
]

RUNNING: list[Edit] = [
    ("the best rank is pushed out", Scheduler, "_schedule_running", "max(self.running", "min(self.running"),
    ("the last admitted is pushed out", Scheduler, "_schedule_running", "max(self.running, key=_rank)", "self.running[-1]"),
    ("drafts push others out", Scheduler, "_schedule_running", "num_new += share.num_new_blocks", "num_new += share.num_new_blocks + (share.num_drafts > 0)"),
    ("drafts without blocks", Scheduler, "_schedule_running", "min(num_drafts, num_slots - end)", "num_drafts"),
    ("pushed out and lost", Scheduler, "_preempt", "insort(self.waiting, sequence, key=_rank)", "pass"),
    ("pushed out to the end of the queue", Scheduler, "_preempt", "insort(self.waiting, sequence, key=_rank)", "self.waiting.append(sequence)"),
    ("a new admission unstamped", Scheduler, "_schedule_waiting", "sequence.note_scheduled_again(now_ns)", "pass"),
    ("recovered at once", sequence.Sequence, "note_computed", " and end >= last.num_lost_tokens", ""),
    ("pushed out twice, lost once", sequence.Sequence, "note_preempted", "max(num_lost, self.preemptions[-1].num_lost_tokens)", "num_lost"),
    ("pushed out uncounted", Scheduler, "_preempt", "sequence.note_preempted(now_ns)", "pass"),
    ("pushed out, yet still computed", Scheduler, "_free", "sequence.num_computed_tokens = 0", "pass"),
    ("blocks leak at the end and on abort", Scheduler, "_remove", "self._free(sequence)", "sequence.block_table.clear()"),
    ("aborted, yet still running", Scheduler, "abort", "self._remove(sequence)", "self._free(sequence); del self._by_id[request_id]"),
    ("an item that failed alone goes on", Scheduler, "commit", "if index not in output.failures:", "if True:"),
    ("an item that failed alone ends without error", engine, "_request_row", "error=error", "error=None"),
    ("a failed step is kept", Scheduler, "fail", "failed = [item.sequence for item in batch.items]", _FAILED_STEP_KEPT),
    ("draft slots are not rolled back", Scheduler, "_commit_item", "end += num_kept - 1 - num_drafts", "pass"),
    ("one rejected draft counts as computed", Scheduler, "_commit_item", "num_kept - 1 -", "num_kept -"),
    ("blocks of rejected drafts leak", Scheduler, "_commit_item", "self.pool.release(sequence.block_table[num_blocks:])", "pass"),
    ("released draft blocks stay in the table", Scheduler, "_commit_item", "del sequence.block_table[num_blocks:]", "pass"),
    ("drafts are tried again", Scheduler, "_commit_item", "sequence.draft_token_ids = []", "pass"),
    ("accepted drafts go on after the end", Scheduler, "_commit_item", "            break", "            pass"),
    ("an empty answer never ends", Scheduler, "_commit_item", "sequence.sampling.max_tokens == 0", "False"),
    ("an empty answer is sampled", Step, "place", " and sequence.sampling.max_tokens > 0", ""),
    ("one draft more than could be kept", step_budget, "_num_drafts", "num_output_tokens - 1", "num_output_tokens"),
    ("drafts take the budget of others", scheduler, "running_shares", "budget - num_after - num_tokens", "budget - num_tokens"),
    ("dropped drafts are kept", Step, "place", "del sequence.draft_token_ids[num_drafts:]", "pass"),
    ("one token too many", Scheduler, "_finish_reason", "num_output >= sampling.max", "num_output > sampling.max"),
    ("the end of text is ignored", Scheduler, "_finish_reason", "not sampling.ignore_eos", "False"),
    ("the end of text always ends", Scheduler, "_finish_reason", " and not sampling.ignore_eos", ""),
    ("stop tokens are ignored", Scheduler, "_finish_reason", "token_id in sampling.stop_token_ids", "False"),
    ("min_tokens is ignored", Scheduler, "_finish_reason", " and num_output >= sampling.min_tokens", ""),
    ("forced tokens end early", Scheduler, "_finish_reason", "sampling.forced_token_ids is None and ", ""),
    ("rows beyond the end", engine, "_token_rows", "[: len(sequence.token_ids) - num_known]", ""),
    ("prompt rows given out twice", engine, "_prompt_rows", "sequence.num_prompt_logprobs += len(entries)", "pass"),
]

EDITS = [*POOL, *ADMISSION, *RUNNING]
