"""What every test has at hand: real rows where there are some, and one thread a process."""

import importlib.util
import os
import tempfile

# before torch is imported anywhere; the workers share the cores already
os.environ.setdefault("OMP_NUM_THREADS", "1")
# rows outside of their tables raise, whatever reads them
os.environ.setdefault("DISTEMBED_CHECK_ROWS", "1")
os.environ.setdefault("FBGEMM_TBE_BOUNDS_CHECK_MODE", "0")

from pathlib import Path

import hypothesis
import pytest
import yaml

# No deadline: an example may be the first to import or to compile something.
hypothesis.settings.register_profile("distembed", deadline=None)
hypothesis.settings.load_profile("distembed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=100, help="How many strikes hit training runs, among the slow tests.")
    parser.addoption("--flips", type=int, default=1000, help="How many bits are flipped, in each of the slow tests.")
    parser.addoption("--cases", type=int, default=300, help="How many models and batches of ids the slow test draws.")


def pytest_configure(config: pytest.Config) -> None:
    # where the workers, which inherit the environment, find the servers of tests/processes.py
    if "DISTEMBED_TEST_SERVERS" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="distembed-tests-")
        os.environ["DISTEMBED_TEST_SERVERS"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # with DISTEMBED_DRY_GPU=1 the tests of this folder run on a processor: all of them but the kernels
    dry = Path(__file__).parent / "gpu" if os.environ.get("DISTEMBED_DRY_GPU") == "1" else None
    on_gpu = [item for item in items if item.get_closest_marker("gpu") and dry not in item.path.parents]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="session")
def criteo_sample() -> Path:
    """110,000 real Criteo rows, in the order of time."""
    path = os.environ.get("DISTEMBED_CRITEO_SAMPLE")
    if not path:
        pytest.skip("DISTEMBED_CRITEO_SAMPLE is unset: it names a TSV file of real Criteo rows")
    if not Path(path).is_file():
        pytest.fail(f"DISTEMBED_CRITEO_SAMPLE is {path!r}, which is no file")
    return Path(path)


@pytest.fixture(scope="session")
def movielens() -> Path:
    """The folder of ml-100k: that of DISTEMBED_RECBOLE, or of the wheel, nothing of which is imported."""
    found = importlib.util.find_spec("recbole")
    wheel = None if found is None or found.origin is None else Path(found.origin).parent
    path = os.environ.get("DISTEMBED_RECBOLE", "" if wheel is None else str(wheel / "dataset_example" / "ml-100k"))
    if not path:
        pytest.skip("DISTEMBED_RECBOLE is unset: it names the folder ml-100k of the wheel recbole==1.2.1")
    if not (Path(path) / "ml-100k.inter").is_file():
        pytest.fail(f"DISTEMBED_RECBOLE is {path!r}, which has no file ml-100k.inter")
    return Path(path)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small dataset of :mod:`tests.small_runs`, which loads torch."""
    from tests.small_runs import write_dataset

    return write_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture
def config(tmp_path: Path, dataset: Path) -> Path:
    """A YAML file of the small model of :mod:`tests.small_runs`."""
    from tests.small_runs import config_values

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config_values(dataset)))
    return path
