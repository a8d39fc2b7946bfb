"""test_toolkit.py -- tests that kernels compile if nvcc and the libraries' headers lie in different
places, as on an image with a toolkit of its own and PyTorch's wheels. A mount namespace hides all
other headers."""

import os
import pathlib
import re
import subprocess

import pytest

from tests.lib import law, namespaces, trainer
from tests.lib.patience import LIMIT

# $1: the toolkit; $2: a scratch folder; $3: a checkout. The toolkit loses cuBLAS' headers, and the
# compiler's own search path all headers that a distribution may have put there.
APART = r"""
set -eu
toolkit=$1 scratch=$2 checkout=$3 farm=$2/farm
mkdir -p "$scratch"/all "$scratch"/less "$scratch"/none "$farm"/include
mount --bind "$toolkit/include" "$scratch/all"
ln -s "$scratch"/all/* "$scratch/less/"
rm "$scratch"/less/cublas*
mount --bind "$scratch/less" "$toolkit/include"
[ ! -d /usr/local/include ] || mount --bind "$scratch/none" /usr/local/include
ln -s "$toolkit/bin" "$toolkit/nvvm" "$farm/"
ln -s "$toolkit/lib" "$farm/lib"
ln -s "$scratch"/all/* "$farm/include/"
cd "$checkout"
! CUDA_HOME=$toolkit runtime/cuda/toolkit 2>/dev/null || { echo 'the headers still show'; exit 9; }
CUDA_HOME=$farm ZR_GENCODE='-gencode arch=compute_90a,code=sm_90a' ninja out/o/cuda/linear.o
"""


@pytest.mark.slow
def test_headers_of_another_place(tmp_path: pathlib.Path) -> None:
    alone = namespaces.mounts()
    trainer.sh("runtime/cuda/toolkit")
    toolkit = (trainer.ROOT / "out/cuda/root").resolve()
    (tmp_path / "checkout").mkdir()
    checkout = trainer.checkout(tmp_path / "checkout")
    bare = {
        name: text
        for name, text in os.environ.items()
        if name not in ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH")
    }
    nccl = (trainer.ROOT / "out/cuda/nccl/include/nccl.h").resolve().parent.parent
    done = subprocess.run(
        [
            *alone,
            "bash",
            "-c",
            APART,
            "apart",
            toolkit,
            tmp_path / "scratch",
            checkout,
        ],
        env=bare | {"NCCL_HOME": str(nccl)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "out/o/cuda/linear.o").exists()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["lib", "lib64"])
def test_libraries_are_where_the_toolkit_found_them(
    tmp_path: pathlib.Path, where: str
) -> None:
    """Both products name the libraries' folder that was found, lib64 of NVIDIA's installers or lib
    of its wheels, and no other."""
    parts = trainer.objects(trainer.CUDA)
    toolkit = (trainer.ROOT / "out/cuda/root").resolve()
    farm = tmp_path / "farm"
    farm.mkdir()
    for name in ("bin", "nvvm", "include"):
        (farm / name).symlink_to(toolkit / name)
    (farm / where).mkdir()  # not a link, so its own name stays
    for path in (trainer.ROOT / "out/cuda/lib").resolve().iterdir():
        (farm / where / path.name).symlink_to(path)
    checkout = trainer.checkout(tmp_path / "checkout")
    nccl = (trainer.ROOT / "out/cuda/nccl/include/nccl.h").resolve().parent.parent
    settings = {**os.environ, "CUDA_HOME": str(farm), "NCCL_HOME": str(nccl)}
    subprocess.run(
        ["runtime/cuda/toolkit"],
        cwd=checkout,
        env=settings,
        check=True,
        timeout=60,
    )
    for made in parts:
        place = checkout / made.relative_to(trainer.ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(made)
    source = checkout / "out/train.c"
    source.write_text(trainer.generate(law.path("gpt")))
    trainer.compile_source(
        trainer.CUDA, source, "-c", "-o", checkout / "out/o/cc/train.o"
    )
    for product in ("out/train-cuda", "out/train-cuda-kernels.so"):
        link = trainer.sh("ninja", "-t", "commands", "-s", product).splitlines()[-1]
        assert product in link
        subprocess.run(["sh", "-c", link], cwd=checkout, check=True, timeout=120)
        found = trainer.sh("readelf", "-d", checkout / product)
        runpath = re.search(r"R(?:UN)?PATH.*\[(.*)\]", found)[1].split(":")
        assert runpath[0] == str(farm / where)


def test_other_processors_are_another_object(tmp_path: pathlib.Path) -> None:
    """Objects that depend on the names of processors are compiled anew when these change, and only
    then."""
    checkout = trainer.checkout(tmp_path / "checkout")
    named = "out/o/cuda/processors"

    def made(processors: str) -> int:
        subprocess.run(
            ["ninja", named],
            cwd=checkout,
            env={**os.environ, "ZR_GENCODE": processors},
            check=True,
            capture_output=True,
        )
        return (checkout / named).stat().st_mtime_ns

    first = made("-arch=sm_80")
    assert made("-arch=sm_80") == first != made("-arch=sm_90")
    assert named in trainer.sh("ninja", "-t", "query", "out/o/cuda/linear.o")


def test_the_image_has_the_programs_libraries() -> None:
    """Dockerfile.cuda copies the libraries that the program is linked with, of the folders in which
    runtime/cuda/toolkit finds them."""
    rules = (trainer.ROOT / "runtime/cuda/objects.ninja").read_text()
    linked = re.search(r"^rule cuda_link\n(.*?)^\S", rules, re.M | re.S)[1]
    image = (trainer.ROOT / "Dockerfile.cuda").read_text()
    copied = re.findall(r"out/cuda/(?:lib|nccl/lib)/(lib\w+\.so\.\d+)", image)
    assert copied == re.findall(r"-l:(lib\w+\.so\.\d+)", linked) != []
    trainer.sh("runtime/cuda/toolkit")
    for name in re.findall(r"out/cuda/\S+\.so\.\d+", image):
        assert (trainer.ROOT / name).exists(), name
    listed = (trainer.ROOT / ".dockerignore").read_text().split()
    assert "out/*" in listed and ".venv" in listed
