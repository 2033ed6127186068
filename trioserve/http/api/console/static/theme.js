/** Light or dark: as the system has it, until the reader chooses. */

import { button } from "./dom.js";

const STORED = "trioserve.theme";
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

export function applyTheme() {
  const chosen = localStorage.getItem(STORED);
  if (chosen) document.documentElement.dataset.theme = chosen;
}

export function toggleTheme() {
  const chosen = isDark() ? "light" : "dark";
  localStorage.setItem(STORED, chosen);
  document.documentElement.dataset.theme = chosen;
}

export function themeButton() {
  return button("◐", toggleTheme, {
    class: "quiet",
    "aria-label": "Light or dark",
    title: "Light or dark (t)",
  });
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : prefersDark.matches;
}
