import mobile.Mobile;
import mobile.Proxy;
import mobile.Settings;
import mobile.UploadWatcher;

/** Phone uploads a file as an app does: SERVER TOKEN FILE URL. */
public class Phone {
    public static void main(String[] args) throws Exception {
        Settings settings = new Settings();
        settings.setServer(args[0]);
        settings.setToken(args[1]);
        settings.setPlain(true);
        Proxy proxy = Mobile.start(settings);
        proxy.uploadFile(args[2], args[3], new UploadWatcher() {
            public boolean onProgress(long sent, long total) {
                if (sent == total) {
                    System.out.println("sent " + sent + " of " + total);
                }
                return true;
            }
        });
        System.out.println(proxy.stats().toJSON());
        try {
            proxy.uploadFile("/none", args[3], null);
        } catch (Exception e) {
            System.out.println("error: " + e.getMessage());
        }
        proxy.close();
        System.exit(0); // Go's threads stay
    }
}
