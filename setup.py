"""Builds the recorder's three C libraries; everything else is in pyproject.toml."""

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOM = "mkb_env/recorder/driver"
LIBRARIES = {  # extension -> (file name, which is also its SONAME, sources, extra link arguments)
    "cute_runtime": ("libmkb_cute_runtime.so", ["cute_runtime.c"], []),
    "cudart": ("libcudart.so.13", ["cudart.c"], [f"-Wl,--version-script={ROOM}/cudart.map"]),
    "cuda_driver": ("libcuda.so.1", ["cuda_driver.c", "redirect.c"], ["-ldl"]),
}


class BuildLibraries(build_ext):
    """Plain shared libraries, not Python modules: fixed file names, no module-init symbol."""

    def get_ext_filename(self, fullname):
        *package, name = fullname.split(".")
        return "/".join([*package, LIBRARIES[name][0]])

    def get_export_symbols(self, ext):
        return []


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3: the libraries do not use Python's C API."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            f"mkb_env.recorder.driver.{name}",
            [f"{ROOM}/{source}" for source in sources],
            depends=[f"{ROOM}/sink.h"],
            extra_compile_args=["-std=c11", "-O2", "-Wall", "-Werror"],
            extra_link_args=[f"-Wl,-soname,{file}", *extra],
        )
        for name, (file, sources, extra) in LIBRARIES.items()
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
