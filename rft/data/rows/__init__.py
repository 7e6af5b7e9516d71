"""Rows of data sets. Importing this package registers the schemas of rows."""

from rft.data.rows import schemas

__all__ = ["schemas"]
