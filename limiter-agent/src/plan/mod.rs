//! From a valid configuration to the contents of the maps. PURE: the host is an argument.

