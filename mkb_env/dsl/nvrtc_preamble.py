"""A lighter form of what TVM puts before every CUDA source.

TVM includes libcu++'s ``limits`` for one constant and its ``type_traits`` for eight templates. Reading the two headers
takes NVRTC 1.5 to 2 s, nine tenths of a TIRx compilation. The definitions below mean the same; where TVM's text is not
what is expected here, it stays as it is.
"""

from __future__ import annotations

NAMES = (
    "is_same",
    "is_same_v",
    "is_integral",
    "is_signed",
    "is_unsigned",
    "is_floating_point",
    "enable_if",
    "conditional",
)
INTEGERS = (
    "bool", "char", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned int", "long",
    "unsigned long", "long long", "unsigned long long",
)  # fmt: skip


def _traits() -> str:
    kinds = [f"template <> struct is_integral<{name}> {{ static constexpr bool value = true; }};" for name in INTEGERS]
    kinds += [
        f"template <> struct is_floating_point<{name}> {{ static constexpr bool value = true; }};"
        for name in ("float", "double")
    ]
    return "\n".join(
        [
            "namespace std {",
            "template <class A, class B> struct is_same { static constexpr bool value = false; };",
            "template <class A> struct is_same<A, A> { static constexpr bool value = true; };",
            "template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;",
            "template <class A> struct is_integral { static constexpr bool value = false; };",
            "template <class A> struct is_floating_point { static constexpr bool value = false; };",
            *kinds,
            "template <class A> struct is_signed { static constexpr bool value =",
            "  is_floating_point<A>::value || (is_integral<A>::value && A(-1) < A(0)); };",
            "template <class A> struct is_unsigned { static constexpr bool value =",
            "  is_integral<A>::value && !(A(-1) < A(0)); };",
            "template <bool yes, class A = void> struct enable_if {};",
            "template <class A> struct enable_if<true, A> { typedef A type; };",
            "template <bool yes, class A, class B> struct conditional { typedef A type; };",
            "template <class A, class B> struct conditional<false, A, B> { typedef B type; };",
            "}",
            "",
        ]
    )


REPLACED = (
    (
        "#include <cuda/std/limits>\n#ifndef INFINITY\n"
        "#define INFINITY (::cuda::std::numeric_limits<float>::infinity())\n#endif\n",
        "#ifndef INFINITY\n#define INFINITY (__int_as_float(0x7f800000))\n#endif\n",
    ),
    (
        "  #include <cuda/std/type_traits>\n  namespace std {\n"
        + "".join(f"    using cuda::std::{name};\n" for name in NAMES)
        + "  }\n",
        _traits(),
    ),
)


def lighter(code: bytes) -> bytes:
    """The source with both headers' uses replaced."""
    text = code.decode()
    for heavy, light in REPLACED:
        text = text.replace(heavy, light)
    return text.encode()
