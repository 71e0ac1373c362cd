"""GroupQueryAttention in NumPy, clear and slow: what kernels and operator are tested against.

B batch, S new tokens, N query heads, N_kv key/value heads, G = N / N_kv, H head size, C cache
capacity, T total_sequence_length, HP = H or (H + 1) // 2 for INT4. Positions are absolute: 0 is the
first token an entry ever saw, also where a sliding window cache has dropped it.
"""

from gqa_tvm.reference.attention import attend, process_scores, softmax, visible_keys
from gqa_tvm.reference.cache import CacheLayout, History, write_cache
from gqa_tvm.reference.lengths import Lengths, retained_length
from gqa_tvm.reference.operator import ReferenceResult, group_query_attention
from gqa_tvm.reference.quantization import dequantize, quantize
from gqa_tvm.reference.tokens import rms_norm, rotate, split_heads

__all__ = [
    "CacheLayout",
    "History",
    "Lengths",
    "ReferenceResult",
    "attend",
    "dequantize",
    "group_query_attention",
    "process_scores",
    "quantize",
    "retained_length",
    "rms_norm",
    "rotate",
    "softmax",
    "split_heads",
    "visible_keys",
    "write_cache",
]
