
from collections import abc as _abc


