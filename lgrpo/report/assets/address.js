// The part of the page's state that survives a reload, kept in the address after "#": filters, zoom, axis, theme.
// Defines: saved (read with saved.get), remember.

const saved = new URLSearchParams(location.hash.slice(1));

function remember(name, value) {
  if (isMissing(value) || value === "") saved.delete(name);
  else saved.set(name, value);
  try { history.replaceState(null, "", `#${saved}`); } catch { location.hash = saved.toString(); }
}
