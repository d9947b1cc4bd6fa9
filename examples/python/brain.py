"""The brain as a plain object, for a gateway that has everything else: no runtime, no planes, no threads.

    python brain.py
"""

import kvasir

router = kvasir.Router(block_size=4)
for worker in (1, 2):
    router.add_worker(worker, total_kv_blocks=1000)

prompt = [7, 7, 7, 7, 8, 8, 8, 8, 9]
router.stored(2, prompt[:8], [101, 102])  # what worker 2's engine says it has

decision = router.place(prompt, "request-1")
print(f"worker {decision.worker_id}, {decision.overlap_blocks} blocks cached, because of {decision.reason}")
for candidate in decision.candidates:
    print(f"  worker {candidate.worker_id}: cost {candidate.cost} = prefill {candidate.prefill_blocks} + decode {candidate.decode_blocks}")
router.mark_prefill_complete("request-1")  # at the first token
router.free("request-1")  # at the end

for worker in (1, 2):
    router.place(list(range(worker * 100, worker * 100 + 40)), f"other-{worker}", worker_id=worker)
print(router.potential_loads(prompt))
