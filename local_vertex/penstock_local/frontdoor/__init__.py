"""Where unmodified clients come in: own CA, throw-away credentials, one CONNECT proxy, and the check of every token."""
