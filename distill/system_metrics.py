"""What the machine did during a stage, in MLflow's "System metrics" tab: processor, memory, disk, network
and, where there is one, GPU.

MLflow's own monitor, a thread that looks every ten seconds (MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL says
otherwise). Not for stages that time something: the thread would be in the figures.
"""

import contextlib
import logging
from collections.abc import Iterator

MONITORED = ("sample", "train")


@contextlib.contextmanager
def system_metrics(stage: str, run_id: str, tracking_uri: str) -> Iterator[None]:
    """Log `system/...` metrics to the run while the block lasts, for the stages in `MONITORED`.

    A tracking server that dies meanwhile costs these metrics alone: the monitor then stops by itself.
    """
    if stage not in MONITORED:
        yield
        return
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    for module in ("mlflow.system_metrics", "mlflow.utils.autologging_utils"):
        logging.getLogger(module).setLevel(logging.ERROR)  # it announces itself at every start and stop
    monitor = SystemMetricsMonitor(run_id, tracking_uri=tracking_uri)
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()
