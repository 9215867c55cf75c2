// Numbers as people read them.

export const number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
};

const scaled = (value, factor, names) => {
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < names.length - 1) { value /= factor; power += 1; }
  return `${Number(value.toPrecision(3))}${names[power]}`;
};

export const count = (value) => (value === null || value === undefined ? "" : scaled(value, 1000, ["", " k", " M", " B"]));
export const bytes = (value) => (value === null || value === undefined ? "" : scaled(value, 1000, [" B", " kB", " MB", " GB", " TB"]));

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 10 ? Number(seconds.toFixed(1)) : whole} s`;
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([amount]) => amount > 0);
  return parts.slice(first, first + 2).filter(([amount]) => amount > 0).map(([amount, unit]) => `${amount} ${unit}`).join(" ");
};

export const when = (time) => (time ? new Date(time).toLocaleString([], { dateStyle: "short", timeStyle: "short" }) : "");
