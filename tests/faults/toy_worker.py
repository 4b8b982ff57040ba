"""One process of a toy job: python -m tests.faults.toy_worker INDEX COUNT PORT DIRECTORY [fault].

Faults: sigterm-at=K (this process signals itself while step K runs), sleep-at=K (its batch K never comes).
"""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import sys
import time

NUM_STEPS, SAVE_EVERY, LIMIT_S = 40, 10, 5.0


def main(index: int, count: int, port: int, directory: pathlib.Path, fault: str) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax

    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(f"localhost:{port}", count, index, initialization_timeout=60)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from overlapfx.train import loop, metrics
    from overlapfx.train.checkpoint import Checkpointer
    from overlapfx.train.console import Console
    from overlapfx.train.replicas import check_replicas
    from overlapfx.train.watchdog import Watchdog

    kind, _, at = fault.partition("=")
    mesh = jax.make_mesh((2 * count,), ("y",), axis_types=(AxisType.Auto,))

    class Numbers:
        """Batch k is full of k; a position that can be saved."""

        def __init__(self) -> None:
            self.next = 0

        def __next__(self) -> dict[str, np.ndarray]:
            if kind == "sigterm-at" and self.next == int(at):
                os.kill(os.getpid(), signal.SIGTERM)
            if kind == "sleep-at" and self.next == int(at):
                time.sleep(3600)
            time.sleep(0.02)
            self.next += 1
            return {"x": np.full(2, self.next, np.float32)}

        def get_state(self) -> dict[str, int]:
            return {"next": self.next}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, one = batch["x"].sum() + state.sum() / 7, jnp.float32(1)
        return state + loss / 1e4, {"loss": loss, "grad_norm": one, "learning_rate": one, "tokens": one}

    numbers = Numbers()
    with Checkpointer(directory / "checkpoints", keep=3) as checkpointer:
        state = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("y")))
        found, start = checkpointer.restore_newest(state, fall_back=True), 0
        if found is not None:
            start, state, position = found
            numbers.next = position["next"]
        writer = metrics.MetricsWriter(directory / "metrics.jsonl", from_step=start, primary=index == 0)
        console = Console(NUM_STEPS, primary=index == 0)
        log = loop.RunLog(writer, console, metrics.Utilization(1.0, 1.0, 2 * count, None))
        for sentence in checkpointer.skipped:
            console.note(sentence)
        with Watchdog(LIMIT_S, directory, process=index, on_hang=log.hung) as watchdog:
            _, summary = loop.run(
                state=state,
                train_step=step,
                batches=numbers,
                place=functools.partial(loop.to_global, mesh=mesh, spec=P("y")),
                schedule=loop.Schedule(NUM_STEPS, checkpoint_every=SAVE_EVERY),
                log=log,
                start_step=start,
                checkpointer=checkpointer,
                check=check_replicas,
                watchdog=watchdog,
            )
        writer.close()
    return summary.exit_code


if __name__ == "__main__":
    index, count, port, directory, *fault = sys.argv[1:]
    sys.exit(main(int(index), int(count), int(port), pathlib.Path(directory), fault[0] if fault else ""))
