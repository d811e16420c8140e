"""Adaptors over an upstream memory resource: they watch, count, cap and break. They compose in any order."""

from engine.memory.adaptors.adaptor import MemoryAdaptor, gauge_of
from engine.memory.adaptors.fault_injecting import Fault, FaultInjectingMemoryResource
from engine.memory.adaptors.limiting import LimitingMemoryResource, cap_of
from engine.memory.adaptors.statistics import MemoryStatistics, StatisticsMemoryResource, TagStatistics
from engine.memory.adaptors.tracing import TracingMemoryResource

__all__ = [
    "Fault",
    "FaultInjectingMemoryResource",
    "LimitingMemoryResource",
    "MemoryAdaptor",
    "MemoryStatistics",
    "StatisticsMemoryResource",
    "TagStatistics",
    "TracingMemoryResource",
    "cap_of",
    "gauge_of",
]
