"""Other systems, each behind one module that alone imports it."""
