"""Static instruction counts by class in the machine code of a kernel. Execution counts are unknown."""

import re
from collections import Counter

CLASSES = ("matrix", "float", "special", "shared", "global", "async copy", "local", "control", "other")

_SASS = {  # opcode prefixes in nvdisasm output
    "matrix": r"\w*MMA",
    "special": "MUFU",
    "async copy": "LDGSTS|UBLKCP|UTMALDG",
    "shared": "LDS|STS|LDTM|STTM",  # and Blackwell's tensor memory
    "global": "LDG(?!DEPBAR)|STG|LD$|ST$",
    "local": "LDL|STL",
    "float": "FFMA|FADD|FMUL|FMNMX|DFMA|DADD|DMUL|HFMA2|HADD2|HMUL2",
    "control": "BRA|EXIT|BAR|BSSY|BSYNC|BREAK|CALL|RET|WARP|SYNCS|DEPBAR|LDGDEPBAR|UTCBAR|MEMBAR|FENCE|ERRBAR|ELECT",
}
_AMDGCN = {
    "matrix": "v_mfma",
    "special": "v_(exp|log|rcp|rsq|sqrt)_",
    "shared": "ds_",
    "global": "(global|buffer|flat)_",
    "local": "scratch_",
    "float": r"v_(pk_)?(fma\w*|add|sub|subrev|mul|max|min|max3|min3|div_\w+|ldexp|rndne|floor)_f(16|32|64)",
    "control": "s_(c?branch|barrier|waitcnt|endpgm|nop|setpc|swappc)",
}
_SASS_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_AMDGCN_LINE = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)", re.MULTILINE)


def instruction_mix(assembly: str) -> dict[str, int]:
    """Count instructions by class, excluding padding (NOP)."""
    amd = "amdgcn" in assembly
    patterns = {name: re.compile(pattern) for name, pattern in (_AMDGCN if amd else _SASS).items()}
    counts: Counter[str] = Counter()
    for opcode in (_AMDGCN_LINE if amd else _SASS_LINE).findall(assembly):
        if opcode not in ("NOP", "s_nop", "s_code_end"):
            counts[next((name for name, pattern in patterns.items() if pattern.match(opcode)), "other")] += 1
    return {name: counts[name] for name in CLASSES}
