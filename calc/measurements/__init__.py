"""Rows that were measured: kept, taken in from elsewhere, laid under a roofline, put in place of what is assumed."""
