// Before the page is painted, so that it does not flash: the theme that was chosen over the system's.
try {
  const theme = localStorage.getItem("jaxis-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // no storage: the system's theme
}
